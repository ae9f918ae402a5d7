"""The update rules, one file each. `rule.py` says what a rule is."""

from .adabelief import ADABELIEF
from .adam import ADAM
from .lion import LION
from .radam import RADAM
from .rule import Options, Rule, Step
from .sgdm import SGDM
from .yogi import YOGI

RULES = {rule.name: rule for rule in (ADAM, SGDM, LION, RADAM, YOGI, ADABELIEF)}

__all__ = ["ADABELIEF", "ADAM", "LION", "RADAM", "RULES", "SGDM", "YOGI", "Options", "Rule", "Step"]
