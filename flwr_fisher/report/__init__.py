"""What a run leaves behind: ``metrics.json``, the model, and pictures."""

from flwr_fisher.report.folder import ReportDir, resolve_output_dir
from flwr_fisher.report.one_shot import report_one_shot

__all__ = ["ReportDir", "report_one_shot", "resolve_output_dir"]
