"""Large embedding tables in training: sparse Adam, and rows in a file for tables beyond memory."""
