# mypy: ignore-errors
"""mini-swe-agent (2.4) for many trials at once: its own prompts, loop and model, our sandbox.

In: link.py's jobs. Out: how it stopped. Its SWE-bench configuration is the package's own; only the
environment behind its bash tool is ours. The patch is taken from the sandbox, however it ends.
"""

import litellm
import yaml
from link import Link, serve
from minisweagent import package_dir
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel

CONFIG = yaml.safe_load((package_dir / "config/benchmarks/swebench.yaml").read_text())
STOPS = {
    "Submitted": "finished",
    "LimitsExceeded": "max_turns",
    "RepeatedFormatError": "plain_text",
}
TEMPLATES = ("observation_template", "format_error_template")


class SandboxEnvironment(LocalEnvironment):
    """Each command in a fresh shell of the trial's sandbox."""

    def __init__(self, link: Link) -> None:
        super().__init__(cwd=link.job["workdir"], env=CONFIG["environment"]["env"])
        self.link = link

    def execute(self, action: dict, cwd: str = "", *, timeout: int | None = None) -> dict:
        variables = [f"{name}={value}" for name, value in self.config.env.items()]
        code, output = self.link.run("env", *variables, "bash", "-c", str(action["command"]))
        timed_out = "the command ran too long and was killed" if code == 124 else ""
        text = output.decode("utf-8", errors="replace")
        result = {"output": text, "returncode": code, "exception_info": timed_out}
        self._check_finished(result)
        return result


class Model(LitellmModel):
    abort_exceptions = [*LitellmModel.abort_exceptions, litellm.exceptions.BadRequestError]
    link: Link

    def query(self, *args, **kwargs) -> dict:
        self.link.call("asking")
        return super().query(*args, **kwargs)


class RecordedAgent(DefaultAgent):
    def add_messages(self, *messages: dict) -> list[dict]:
        for message in messages:
            if message["role"] != "exit":
                told = {key: value for key, value in message.items() if key != "extra"}
                facts = {"model_calls": self.n_calls}
                self.env.link.call("message", message=told, again=False, facts=facts)
        return super().add_messages(*messages)


def work(link: Link) -> dict:
    job, model = link.job, link.job["model"]
    service = {"api_base": job["base_url"], "api_key": model["api_key"] or "none"}
    service |= CONFIG["model"]["model_kwargs"] | {"timeout": model["timeout_sec"]}
    sampling = {key: model[key] for key in ("temperature", "max_tokens", "seed")}
    sampling["extra_body"] = model["sampling"]
    llm = Model(
        model_name=f"openai/{model['name']}", model_kwargs=service | sampling,
        cost_tracking="ignore_errors", **{key: CONFIG["model"][key] for key in TEMPLATES}
    )  # fmt: skip
    llm.link = link
    limits = {"step_limit": job["max_turns"], "cost_limit": 0}
    agent = RecordedAgent(llm, SandboxEnvironment(link), **(CONFIG["agent"] | limits))
    stop = STOPS[agent.run(job["instruction"])["exit_status"]]
    return {"stop": stop, "facts": {"model_calls": agent.n_calls}}


if __name__ == "__main__":
    serve(work)
