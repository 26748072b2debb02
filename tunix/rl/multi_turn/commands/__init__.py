"""Command-line tools around policies: inspect, try, pretrain, plan memory."""
