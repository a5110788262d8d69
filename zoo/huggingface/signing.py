"""Signatures of a model's files by the package model-signing (OpenSSF), with a key pair and without a network."""

from __future__ import annotations

import re
from pathlib import Path

from pipelines.core.errors import RequestError, ZooError, one_line, requires

SIGNATURE = "model.sig"
LOCKS = ".*lock"  # files that commands leave in a model folder
PACKAGE = "int8-zoo[sign]"
_DIGESTS = re.compile(r""": Expected \W*Digest.*?, Actual \W*Digest.*?\)\\?'""")  # the file before them says enough


def sign(folder: Path, private_key: Path) -> Path:
    """Signs all files of a folder with an elliptic-curve key.

    Args:
        folder: Folder without symbolic links.
        private_key: PEM file of the private key, without a password.

    Returns:
        Path of the signature in the folder.

    Raises:
        RequestError: The key is missing or invalid.
    """
    with requires("--signature", PACKAGE):
        from model_signing import hashing, signing
    signature = folder / SIGNATURE
    hashes = hashing.Config().set_ignored_paths(paths=[signature], ignore_git_paths=True)
    try:
        signer = signing.Config().use_elliptic_key_signer(private_key=_key(private_key))
        signer.set_hashing_config(hashes).sign(folder, signature)
    except (OSError, TypeError, ValueError) as error:
        raise RequestError(f"cannot sign with {private_key}: {one_line(error)}; give a PEM private key") from error
    return signature


def verify(folder: Path, public_key: Path) -> list[str]:
    """Verifies the signature of a folder.

    Args:
        folder: Folder with its signature; symbolic links to files are followed, and locks of other commands ignored.
        public_key: PEM file of the public key.

    Returns:
        Names of the signed files.

    Raises:
        RequestError: The folder has no signature, or the key is missing or invalid.
        ZooError: The signature is by another key, or a file is missing, new or different.
    """
    with requires("zoo verify", PACKAGE):
        from cryptography import exceptions
        from model_signing import hashing, verifying
    signature = folder / SIGNATURE
    if not signature.is_file():
        raise RequestError(f"found no {SIGNATURE} in {folder}, expected a model that zoo push --signature KEY wrote")
    try:
        verifier = verifying.Config().use_elliptic_key_verifier(public_key=_key(public_key))
    except (TypeError, ValueError) as error:
        raise RequestError(f"cannot read {public_key}: {one_line(error)}; give a PEM public key") from error
    ignored = [signature, *folder.glob(LOCKS)]
    hashes = hashing.Config().set_ignored_paths(paths=ignored, ignore_git_paths=True).set_allow_symlinks(True)
    try:
        verifier.set_hashing_config(hashes).verify(folder, signature)
    except (exceptions.InvalidSignature, OSError, TypeError, ValueError) as error:
        if "Key mismatch" in str(error):
            raise ZooError(f"{folder} was signed with another key than that of {public_key}") from error
        fault = _DIGESTS.sub("", one_line(error))
        raise ZooError(f"the signature does not match {folder}: {fault}; download the model again") from error
    return sorted(
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file() and path not in ignored and not path.name.startswith(".git")
    )


def _key(path: Path) -> Path:
    """Returns the path of a key that exists; raises RequestError otherwise."""
    if not path.is_file():
        raise RequestError(f"found no key {path}; make a pair with openssl, see docs/share.md")
    return path
