"""Agents, an engine and a proxy that all fail at random; what is left over must be exact."""

import asyncio
import logging

import pytest
from soak import soak


def run(folder, at, *counts, **more):
    logging.disable(logging.CRITICAL)  # the server's own account of connections that break
    try:
        return asyncio.run(soak(folder, at, *counts, **more))
    finally:
        logging.disable(logging.NOTSET)


@pytest.mark.interop
def test_a_little(folders, tmp_path):
    report = run(folders["bpe"], tmp_path, 8, 30, kills=2)
    assert report.kills == 2 and report.engine_calls >= 8 * 31
    assert report.hung_up and report.refused_by_engine and report.broken_off_by_engine
    assert report.sampled == report.trained + sum(report.masked.values())
    assert report.trained > 0.8 * report.sampled


@pytest.mark.soak
def test_the_whole(folders, tmp_path):
    """64 x 200 with five kills; then, in the same process, four times 8 x 200: flat memory."""
    report = run(folders["bpe"], tmp_path, 64, 200, kills=5, waves=4)
    assert report.kills == 5 and report.engine_calls >= 96 * 201
    assert report.sampled == report.trained + sum(report.masked.values())
    assert report.mib_sealed[-1] < report.mib_sealed[1] + 8  # after the first wave of one life
