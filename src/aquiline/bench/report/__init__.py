"""The report: results as one page."""
