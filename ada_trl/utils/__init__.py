"""What every room may use: files, processes, notices, tables."""
