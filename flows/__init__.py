"""What a person starts: flows, their parameters, the command line."""
