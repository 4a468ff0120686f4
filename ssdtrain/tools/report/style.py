"""The CSS of the report, and the script that shows values under the pointer. Light or dark as the reader's system is."""

from importlib.resources import files

__all__ = ["CSS", "SCRIPT"]

CSS = files("ssdtrain.tools.report").joinpath("report.css").read_text()
SCRIPT = files("ssdtrain.tools.report").joinpath("report.js").read_text()
