"""The `computer` gym: any object with `screenshot()` and `act(action)`."""
