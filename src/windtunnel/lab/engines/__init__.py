"""Real engines, a module each.

A module defines `SERVER`, the command of its server (`lab.servers.EngineServer`), or `start_stepped(config, batch)`,
which starts the engine inside this process (`lab.stepped.SteppedEngine`), and then `version()` too; or both. An
installed package adds an engine with an entry point in the group `windtunnel.lab_engines`.
"""
