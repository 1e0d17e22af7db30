"""Starts a thread when it is imported, which a forked child would not have."""

import threading

threading.Thread(target=threading.Event().wait, daemon=True).start()
