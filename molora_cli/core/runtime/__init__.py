"""The compiled decode step: a routed model for one token, built once beside a running chat."""
