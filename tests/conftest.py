"""Settings of all tests."""

from hypothesis import settings

# Machines that run tests are shared and slow at times: a slow example is no failure.
settings.register_profile("vtoken", deadline=None)
settings.load_profile("vtoken")
