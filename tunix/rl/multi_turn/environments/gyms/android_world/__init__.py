"""The `android_world` gym: phones behind an AndroidWorld server."""
