"""What the benchmarks share: jobs, virtual clients, statistics, tables and pages."""
