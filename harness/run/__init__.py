"""From a command to a finished run folder: planning, answering, sweeps, one process a run."""
