"""Load tests and measurements of a running service, over HTTP only.

``python -m loadtest SCENARIO`` starts ``vtoken-serve serve`` as often as the scenario needs, sends
the same requests to every arm, and writes raw samples, intervals, a table and plots. It imports
nothing of the engine or the service, so it measures what a client sees.
"""
