"""Vocabulary: functions, Greek letters, units, and words that cannot accompany a value."""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


FUNCTIONS = _words(
    "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln lg exp sqrt gcd lcm max min floor ceil abs"
)
GREEK = _words(
    "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi rho varrho "
    "sigma tau upsilon phi varphi chi psi omega Gamma Delta Theta Lambda Xi Sigma Upsilon Phi Psi Omega ell "
    "hbar"
)
COMMAND_OF = {
    "÷": "div", "π": "pi", "∞": "infty", "≤": "le", "≥": "ge", "⩽": "le", "⩾": "ge", "≠": "ne", "∪": "cup",
    "∩": "cap", "∈": "in", "√": "sqrt", "±": "pm", "∓": "mp", "∅": "emptyset", "ℝ": "R", "ℤ": "Z", "ℕ": "N",
    "ℚ": "Q", "ℂ": "C", "∧": "land", "∨": "lor", "⟨": "langle", "⟩": "rangle", "∖": "setminus", "¢": "cent",
    "α": "alpha", "β": "beta", "γ": "gamma", "δ": "delta", "ε": "epsilon", "θ": "theta", "λ": "lambda", "μ": "mu",
    "ν": "nu", "ρ": "rho", "σ": "sigma", "τ": "tau", "φ": "phi", "χ": "chi", "ψ": "psi", "ω": "omega", "Δ": "Delta",
    "Ω": "Omega", "Γ": "Gamma", "Σ": "Sigma", "Φ": "Phi", "Ψ": "Psi", "≡": "equiv", "≈": "approx",
}  # fmt: skip
"""The LaTeX command for a character."""
SHORT_WORDS = _words(
    "cm mm km kg mg ml kl dl cl ft lb lbs oz mph kph kmh in sec min hr hrs yd mi usd eur gbp sq cu per pm am "
    "hz kw mw kj cal mol yr yrs day men cat dog no yes all odd ways rad ton gal pt qt cc amp ohm bit bar not "
    "the is are who one two six ten"
)
"""Runs of two or three letters that are words, not products of variables."""
NO_UNIT = _words(
    "not no nor neither never cannot is are was were be been being it its this that these those he she they we "
    "you i of or and but if unless because since so as than then else otherwise maybe perhaps possibly "
    "probably about around approximately approx roughly nearly almost exactly only just at by to from with "
    "without for on into out up down over under above below between among before after more less fewer greater "
    "larger smaller least most another other others extra additional false wrong incorrect right correct true "
    "guess sure unsure likely unlikely either both all none any some half halves third thirds quarter quarters "
    "fourth fourths fifth fifths sixth sixths seventh sevenths eighth eighths ninth ninths tenth tenths "
    "hundredth hundredths thousandth thousandths times fold double triple twice pair pairs score gross couple "
    "squared cubed factorial plus minus divided multiplied modulo base point positive negative choose "
    "remainder each every where when which who what how why can could may might must shall should will would "
    "do does did has have had zero one two three four five six seven eight nine ten eleven twelve thirteen "
    "fourteen fifteen sixteen seventeen eighteen nineteen twenty thirty forty fifty sixty seventy eighty "
    "ninety hundreds thousands millions billions dozens instead rather alternatively also depending depends "
    "except excluding including the a an different too many few several print eval root roots reciprocal "
    "inverse opposite complement power hundredfold tenfold ish mil lakh crore tens ones "
    "prime presumably hopefully rounded estimate estimated approximated supposedly apparently tentatively"
)
"""Words that change, deny or explain a number: no unit contains them."""
UNITS = {
    "meter": "m metre meters metres", "centimeter": "cm centimetre", "millimeter": "mm millimetre",
    "kilometer": "km kilometre kms", "inch": "in inches", "foot": "ft feet", "yard": "yd yds", "mile": "mi",
    "gram": "g gr gramme gm gms", "kilogram": "kg kilo kgs kilogramme", "milligram": "mg", "pound": "lb lbs £ gbp",
    "ounce": "oz", "liter": "l litre", "milliliter": "ml millilitre", "second": "s sec secs", "minute": "min mins",
    "hour": "h hr hrs", "day": "d", "week": "wk wks", "month": "", "year": "yr yrs", "radian": "rad rads",
    "degree": "° deg degs", "dollar": "$ usd", "cent": "¢ \\cent", "euro": "€ eur", "yen": "¥",
    "rupee": "rs inr", "newton": "N", "joule": "J", "watt": "W", "volt": "V", "ampere": "A amp",
    "kelvin": "K", "hertz": "hz", "mole": "mol", "calorie": "cal", "people": "person persons", "child": "children",
    "man": "men", "woman": "women", "unit": "", "percent": "%", "am": "a.m", "pm": "p.m", "acre": "", "bit": "",
    "ton": "tonne tonnes", "celsius": "", "fahrenheit": "",
}  # fmt: skip
"""Canonical unit -> its other names."""
CASED_UNITS = _words("N J W V A K")
"""Single capitals that are units; in lower case they are another unit or none."""
BARE_UNITS = _words("m g s h d L l N J W V")
"""Single letters that are a unit after a number and a space, even outside of `\\text{}`."""
