"""The report: one HTML file that shows a run, opens offline and asks nobody for anything.

data.py gathers what a run's folder holds, page.py puts it into the page with its scripts and the plotting library
(vendor/, uPlot, MIT), live.py serves it while the run goes on. Nothing here needs torch.
"""
