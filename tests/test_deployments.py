"""The image, the cluster and the recipes that are shipped agree with the package and with each other."""

import importlib
import json
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from safetensors.numpy import save_file

from milepost.flows.plan import make_plan
from milepost.flows.plan_numbers import describe
from milepost.flows.recipe import load_recipe

from .conftest import Prompts

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
DEPLOYMENTS = yaml.safe_load((ROOT / "deployments" / "prefect.yaml").read_text())["deployments"]
RECIPES = sorted((ROOT / "deployments" / "recipes").glob("*.yaml"))
QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "max_position_embeddings": 40960,
}
DENSE = {
    "qwen3-0.6b": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "qwen3-4b": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
}


def instructions() -> list[tuple[str, str]]:
    """What the Dockerfile does, one line each."""
    lines = (line for line in (ROOT / "deployments" / "Dockerfile").read_text().splitlines() if line[:1] != "#")
    joined = "\n".join(lines).replace("\\\n", " ")
    return [(name, rest) for line in joined.splitlines() if line.strip() for name, _, rest in [line.partition(" ")]]


def of_kind(name: str) -> list[str]:
    return [rest for found, rest in instructions() if found == name]


def cluster() -> dict[str, Any]:
    documents = list(yaml.safe_load_all((ROOT / "deployments" / "ray-cluster.yaml").read_text()))
    assert [document["kind"] for document in documents] == ["PersistentVolumeClaim", "RayCluster"]
    found: dict[str, Any] = documents[1]
    return found


def pods() -> list[dict[str, Any]]:
    """The head's pod and the workers'."""
    spec = cluster()["spec"]
    return [group["template"]["spec"] for group in [spec["headGroupSpec"], *spec["workerGroupSpecs"]]]


def test_the_image_installs_a_python_and_extras_that_the_package_has() -> None:
    runs = " ".join(of_kind("RUN"))
    (python,) = {re.sub("-.*", "", word) for word in runs.split() if word.startswith("python3.")}
    assert python.removeprefix("python") in SpecifierSet(PROJECT["project"]["requires-python"])
    (wanted,) = re.findall(r'"\.\[(.*?)\]"', runs)
    assert {"sglang"} <= set(wanted.split(",")) <= set(PROJECT["project"]["optional-dependencies"])


def test_the_image_holds_every_package_and_is_no_roots() -> None:
    copied = {word for rest in of_kind("COPY") for word in shlex.split(rest)[1:-1]}
    assert all((ROOT / name).exists() for name in copied)
    assert {name.split(".")[1] for name in PROJECT["tool"]["setuptools"]["packages"]} <= copied
    assert of_kind("USER") == ["milepost"] and instructions()[-1][0] == "CMD"
    assert not re.search("token=|secret|password|api_key", " ".join(of_kind("RUN") + of_kind("ARG")), re.IGNORECASE)


def test_the_base_image_is_a_cuda_that_torch_is_built_for() -> None:
    (base,) = of_kind("FROM")
    assert re.fullmatch(r"nvidia/cuda:13\.0\.\d+-devel-ubuntu24\.04", base)


def test_every_container_of_the_cluster_is_this_image_with_its_ray() -> None:
    images = {container["image"] for pod in pods() for container in pod["containers"]}
    assert images == {f"milepost:{PROJECT['project']['version']}"}
    (ray,) = (Requirement(name) for name in PROJECT["project"]["dependencies"] if name.startswith("ray["))
    found = cluster()["spec"]["rayVersion"]
    assert found in ray.specifier and of_kind("ARG") == [f"RAY={found}"]


def test_only_workers_have_gpus() -> None:
    head, worker = ([container["resources"]["limits"] for container in pod["containers"]] for pod in pods())
    assert "nvidia.com/gpu" not in head[0] and int(worker[0]["nvidia.com/gpu"]) > 0
    assert cluster()["spec"]["headGroupSpec"]["rayStartParams"]["num-gpus"] == "0"


def test_every_container_takes_the_token_from_the_secret() -> None:
    for pod in pods():
        (container,) = pod["containers"]
        env = {entry["name"]: entry for entry in container["env"]}
        assert env["RAY_AUTH_MODE"]["value"] == "token"
        assert env["RAY_AUTH_TOKEN"]["valueFrom"] == {"secretKeyRef": {"name": "milepost-ray", "key": "auth_token"}}


def test_every_pod_is_the_images_user_with_the_runs_and_shared_memory() -> None:
    user = int(re.findall(r"--uid (\d+)", " ".join(of_kind("RUN")))[0])
    for pod in pods():
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in pod["containers"][0]["volumeMounts"]}
        assert mounts["/runs"]["persistentVolumeClaim"] == {"claimName": "milepost-runs"}
        assert mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory"
        assert pod["securityContext"]["runAsUser"] == pod["securityContext"]["fsGroup"] == user


def test_the_head_has_rays_own_ports() -> None:
    ports = {port["name"]: port["containerPort"] for port in pods()[0]["containers"][0]["ports"]}
    assert ports == {"gcs-server": 6379, "dashboard": 8265, "client": 10001}


@pytest.mark.parametrize("entry", DEPLOYMENTS, ids=lambda entry: entry["name"])
def test_every_deployment_is_a_flow_that_there_is_and_says_what_it_does(entry: dict[str, Any]) -> None:
    module, _, name = entry["entrypoint"].rpartition(".")
    flow = getattr(importlib.import_module(module), name)
    assert flow.name == entry["name"]
    assert "milepost" in entry["tags"] and entry["description"].startswith("**")


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_holds_parameters_that_there_are(recipe: Path) -> None:
    _, own = load_recipe(recipe.stem, [])
    assert own["steps"] > 0


@pytest.fixture
def settings(model_dir: str, tmp_path: Path, prompts: Prompts) -> list[str]:
    """Of a folder that has a configuration and a tokenizer, and a file without a weight."""
    (tmp_path / "tokenizer.json").write_bytes(Path(model_dir, "tokenizer.json").read_bytes())
    save_file({}, tmp_path / "model.safetensors")
    own = [f"model.path={tmp_path}", f"data.path={prompts()}", "data.apply_chat_template=false", "reward.name=exact"]
    served = ['engines.sglang_urls=["http://127.0.0.1:1","http://127.0.0.1:2"]', "engines.rollout_engines=2"]
    return [*own, *served, "engines.sglang={}"]  # so that no SGLang is needed


@pytest.mark.parametrize("name", DENSE)
def test_a_recipe_says_what_the_plan_says(name: str, settings: list[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3 | DENSE[name]))
    parameters, own = load_recipe(name, settings)
    found = describe(make_plan(name, str(tmp_path / "runs"), own["steps"], parameters))
    text = (ROOT / "deployments" / "recipes" / f"{name}.yaml").read_text()
    said = dict(re.findall(r"^#   (\w.*?)  +([\d.,]+)$", text, re.MULTILINE))
    assert len(said) == 4
    assert {key: float(value.replace(",", "")) for key, value in said.items()} == {key: found[key] for key in said}


def test_the_recipe_of_a_mixture_of_experts_says_that_it_cannot_be_trained(settings: list[str], tmp_path: Path) -> None:
    config = QWEN3 | DENSE["qwen3-4b"] | {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 128}
    (tmp_path / "config.json").write_text(json.dumps(config))
    parameters, own = load_recipe("qwen3-30b-a3b", settings)
    with pytest.raises(ValueError, match="is a mixture of 128 experts and cannot be trained") as refused:
        make_plan("moe", str(tmp_path / "runs"), own["steps"], parameters)
    sentence = str(refused.value).partition("LlamaForCausalLM")[0]
    assert sentence in (ROOT / "deployments" / "recipes" / "qwen3-30b-a3b.yaml").read_text()
