"""A trace as one HTML page that needs nothing else: no server, no network, no library."""

from molora_cli.views.report.build import check_report, page, write_report
from molora_cli.views.report.payload import Side

__all__ = ["Side", "check_report", "page", "write_report"]
