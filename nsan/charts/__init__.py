"""Charts: functions from a collected frame to an Altair chart, and the colours that all views share."""
