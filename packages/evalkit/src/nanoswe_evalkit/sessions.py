"""Sessions of a nanoswe-proxy (`model.proxy`), by its control routes: one for each try of a trial.

In: a recipe. Out: the base URL of a try; at its end its trajectory, appended to a file, and how
many replies reached the agent. NANOSWE_ADMIN_KEY is the proxy's key, if it has one. Refuses
(ModelError) a proxy that does not answer.
"""

import os
from pathlib import Path
from typing import Any

import httpx

from nanoswe_evalkit.agents.base import ModelError
from nanoswe_evalkit.recipe import Recipe
from nanoswe_evalkit.records import appending


def proxy_sessions(recipe: Recipe, path: Path) -> dict[str, Any]:
    """`open_session` and `close_session` for `run_trials`."""
    caps: dict[tuple[str, int], str] = {}
    key = {"authorization": f"Bearer {os.environ.get('NANOSWE_ADMIN_KEY') or 'none'}"}
    sampling = {name: getattr(recipe.model, name) for name in ("temperature", "max_tokens")}

    async def post(route: str, body: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        url = recipe.model.proxy.rstrip("/") + route
        try:
            async with httpx.AsyncClient(headers=key, trust_env=False, timeout=60) as client:
                answer = (await client.post(url, json=body)).raise_for_status()
                return answer.text, dict(answer.json())
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, TypeError) as error:
            text = f"proxy: {type(error).__name__} {error}; is {url} a nanoswe-proxy's?"
            raise ModelError(text) from error

    async def open_session(trial_id: str, try_: int) -> str:
        fixed = {"seed_key": f"{recipe.seed}/{trial_id}", "sampling": sampling}
        _, opened = await post("/sessions", {"trial_id": trial_id, "try": try_, **fixed})
        if not {"cap", "base_url"} <= opened.keys():
            raise ModelError(f"{recipe.model.proxy} opened no session; is it a nanoswe-proxy's?")
        caps[trial_id, try_] = str(opened["cap"])
        return str(opened["base_url"])

    async def close_session(trial_id: str, try_: int) -> int:
        text, sealed = await post(f"/sessions/{caps.pop((trial_id, try_))}/seal", {})
        with appending(path) as file:
            file.write(text.strip() + "\n")
        return sum(turn["delivery"] in ("delivered", "acknowledged") for turn in sealed["turns"])

    return {"open_session": open_session, "close_session": close_session}
