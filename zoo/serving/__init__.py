"""Serving: the models of a zoo over HTTP (`zoo serve`), by the Open Inference Protocol and by the tasks' own road.

    server    granian before a front, signals, `--watch`; `app` is the same front for another HTTP server (ASGI)
    front     routes, keys, limits, deadlines; dispatch: queues, idle workers, what goes together
    keeper    opens the models and forks the workers; worker: bodies to arrays to answers by a service (`rows`,
              `photos`, `sentences`)
    inference the protocol's bodies; answers: JSON, CSV, Arrow; metrics, openapi, static (the page)

Nothing else imports this package; its libraries are the extra `serve`.
"""
