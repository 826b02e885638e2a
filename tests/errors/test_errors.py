"""Each row of the table of errors is what the library answers, stands on its page, and reaches the raise that is kept."""
