"""Sessions of a nanoswe-proxy (`model.proxy`), by its control routes: one for each try of a trial.

In: a recipe. Out: the base URL of a try; at its end its trajectory, appended to a file, and how
many replies reached the agent. NANOSWE_ADMIN_KEY is the proxy's key, if it has one. Refuses
(ModelError) a proxy that does not answer.
"""

import json
import os
from pathlib import Path
from typing import Any

import httpx

from nanoswe_evalkit.agents.base import ModelError
from nanoswe_evalkit.recipe import Recipe


def proxy_sessions(recipe: Recipe, path: Path) -> dict[str, Any]:
    """`open_session` and `close_session` for `run_trials`."""
    caps: dict[tuple[str, int], str] = {}
    key = {"authorization": f"Bearer {os.environ.get('NANOSWE_ADMIN_KEY') or 'none'}"}
    sampling = {name: getattr(recipe.model, name) for name in ("temperature", "max_tokens")}

    async def post(route: str, body: dict[str, Any]) -> str:
        url = recipe.model.proxy.rstrip("/") + route
        try:
            async with httpx.AsyncClient(headers=key, trust_env=False, timeout=60) as client:
                return (await client.post(url, json=body)).raise_for_status().text
        except httpx.HTTPError as error:
            raise ModelError(f"proxy: {type(error).__name__} {error}") from error

    async def open_session(trial_id: str, try_: int) -> str:
        fixed = {"seed_key": f"{recipe.seed}/{trial_id}", "sampling": sampling}
        opened = json.loads(await post("/sessions", {"trial_id": trial_id, "try": try_, **fixed}))
        caps[trial_id, try_] = opened["cap"]
        return str(opened["base_url"])

    async def close_session(trial_id: str, try_: int) -> int:
        text = await post(f"/sessions/{caps.pop((trial_id, try_))}/seal", {})
        with path.open("a", encoding="utf-8") as file:
            file.write(text.strip() + "\n")
        turns = json.loads(text)["turns"]
        return sum(turn["delivery"] in ("delivered", "acknowledged") for turn in turns)

    return {"open_session": open_session, "close_session": close_session}
