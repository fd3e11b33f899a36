"""Explains a run: tables, figures and the report. Needs neither torch nor tilelang nor a GPU."""
