"""Run the ranks of an engine in this process or in processes of their own."""
