"""Everything to run the service elsewhere: Helm chart, dashboards."""
