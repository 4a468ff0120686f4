"""What tests of several packages share; no test is here."""
