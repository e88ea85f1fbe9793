"""Settings of the service: the only place that reads the environment.

Every field of :class:`~vtoken.config.VTokenConfig` is a flag ``--vtoken-<field>`` and a variable
``VTOKEN_<FIELD>``; both lists are made from its dataclass fields. What only the HTTP process needs
is in ``http_process``. A flag beats a variable, a variable beats the settings file
(``VTOKEN_CONFIG_FILE``), that beats the default.

Imports go one way: ``layers`` ← ``environment`` ← ``given`` ← ``token_layer``, ``http_process``,
``client`` ← ``unknown``. ``vllm_variables`` stands alone.
"""
