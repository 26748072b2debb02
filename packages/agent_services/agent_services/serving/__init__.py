"""An OpenAI-compatible server in front of the policy that is being trained."""
