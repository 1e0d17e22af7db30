"""Importing this module starts a thread, which no fork would have."""

import threading

threading.Thread(target=threading.Event().wait, daemon=True).start()
