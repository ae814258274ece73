"""One DAG node each, and the choices of algorithm."""
