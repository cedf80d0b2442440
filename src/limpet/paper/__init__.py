"""The paper that introduced committed reveal sampling: its studies, audits, claims and theory."""
