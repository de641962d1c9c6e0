"""What serving costs: hardware and its rates, prices with date and source, and the arithmetic."""
