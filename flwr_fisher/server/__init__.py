"""The server's side of a run: who is asked for what, and what becomes of the replies.

Read it in this order:

``exchange``
    What a strategy says: a round is a list of exchanges, each a request to clients and
    a step from their uploads to the next state.
``driver``
    The loop: for each round its exchanges, then the evaluation, then the callbacks.
``round``
    One exchange: it restores what is on disk, asks, waits, and takes the step.
``door``
    All checks of a reply, in one order, and the clients that are left out, by name.
``cohort``
    The clients: who is who under which name, who may be asked, who is sampled, who sits
    out.
``mailbox``
    Messages that are under way, and replies that are late.
``policy``, ``privacy``, ``waiting``
    The options: how much one client may count, what noise hides it, how long a round
    waits.
``run``, ``journal``
    The state and the result of a run, and their files, from which it is resumed.
``membership``
    What the server knows of clients that keep a state of their own.
"""
