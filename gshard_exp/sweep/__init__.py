"""Many runs as one: what their folders say, side by side, as tables, plots and fitted laws."""
