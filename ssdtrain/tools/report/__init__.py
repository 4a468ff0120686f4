"""The report of a run: one HTML file, or Prometheus text, made from the journals in the directory of `report.path`.

What lives here: `run` (reads the journals of all ranks), `figures` (the numbers of the tiles and tables), `chart` (SVG), `style`
(CSS and the script of the tooltips), `page` (the HTML) and `prometheus` (text format).

May import `ssdtrain.telemetry` and what is below it. Reads files only: neither the machine nor the framework that trained is
needed.
"""
