"""Reports: figures, tables and one HTML page from result files."""
