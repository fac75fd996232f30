"""What `scripts/bench` runs: one module a subcommand, the peers beside us in the same run.

The parent (`__main__`) starts ranks under mpirun (`launch`), each of which runs
one subcommand's `measure` (`ranks`), and makes a table, JSON and plots of what
rank 0 hands back (`report`).
"""
