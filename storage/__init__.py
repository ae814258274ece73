"""Everything that outlives a process."""
