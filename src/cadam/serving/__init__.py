"""The learning service: predicts over HTTP, stores events and labels in a durable log, and learns from the log.

`cadam serve` starts three kinds of processes (`supervisor.py`):

- front processes answer HTTP (`app.py`), predict with the newest snapshot of the model, and write events and labels to
  the log (`event_log.py`) before they answer;
- one learner process (`learner_process.py`) reads the log with `Learner.run` and publishes snapshots (`snapshots.py`);
- the supervisor starts them, and starts them again if they die.

`client.py` has the Python clients, which need neither torch nor the other modules.
"""
