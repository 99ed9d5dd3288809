"""What would help: rules that look at figures, and advise with the evidence in hand."""
