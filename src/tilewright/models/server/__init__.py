"""The server of `tilewright serve`: OpenAI's interface in front of continuous batching.

`protocol` says what a request may hold, `app` answers it, `worker` runs the model, `sampling` draws
its tokens, `text` turns them into text, `room` says how much memory the pages take.
"""
