"""What a run shows and leaves behind: observers and the report."""

from tunix.rl.multi_turn.reporting.metrics_writer import MetricsWriter
from tunix.rl.multi_turn.reporting.progress import ProgressBar
from tunix.rl.multi_turn.reporting.summary_writer import SummaryWriter
from tunix.rl.multi_turn.reporting.trajectory_writer import TrajectoryWriter
