"""APIs of the policy server, one a module; `app.ENDPOINTS` lists them."""
