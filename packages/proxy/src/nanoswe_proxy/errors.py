"""Every error of the proxy, with the HTTP status and the OpenAI-shaped code of its answer.

In: a message of one line. Out: an exception, all that `app` catches and turns into an answer.
"""


class ProxyError(Exception):
    """Base: `status` and `code` are what a client sees."""

    status, code = 500, "internal_error"

    def __init__(self, message: str, status: int = 0, code: str = "") -> None:
        super().__init__(message)
        self.status, self.code = status or self.status, code or self.code

    def body(self) -> dict[str, object]:
        """The OpenAI error body."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": None, "code": self.code}}


class BadRequest(ProxyError):
    status, code = 400, "invalid_request"


class ContextLengthError(BadRequest):
    code = "context_length_exceeded"  # and the message has the words that clients look for

    def __init__(self, limit: int, tokens: int) -> None:
        super().__init__(
            f"prompt is too long: {tokens} tokens > {limit} maximum. This model's maximum context "
            f"length is {limit} tokens. However, your messages resulted in {tokens} tokens."
        )


class SealedError(ProxyError):
    status, code = 409, "session_sealed"


class EngineError(ProxyError):
    status, code = 502, "engine_error"  # the partial turn is kept, masked as `aborted`


class RenderError(ProxyError):
    code = "render_error"  # what cannot be served exactly, or an encode that failed its check


class LogError(ProxyError):
    code = "log_error"  # a log that cannot be written, or a file that is none


class TemplateRefused(RenderError):
    status, code = 400, "template_refused"


class Unextendable(RenderError):
    """The path cannot go on by extension: the next prompt is a new root, for the reason said."""


class TrajectoryError(ProxyError):
    code = "trajectory_error"  # rows that do not line up, or an unknown schema
