"""Vocabulary: functions, Greek letters, units, and words that cannot accompany a value."""


def word_set(text: str) -> frozenset[str]:
    """Return the words of a text."""
    return frozenset(text.split())


FUNCTIONS = word_set(
    "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln lg exp sqrt gcd lcm max min"
    " floor ceil abs"
)
GREEK = word_set(
    "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi"
    " rho varrho sigma tau upsilon phi varphi chi psi omega Gamma Delta Theta Lambda Xi Sigma"
    " Upsilon Phi Psi Omega ell hbar"
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
SHORT_WORDS = word_set(
    "cm mm km kg mg ml kl dl cl ft lb lbs oz mph kph kmh in sec min hr hrs yd mi usd eur gbp sq cu"
    " per pm am hz kw mw kj cal mol yr yrs day men cat dog no yes all odd ways rad ton gal pt qt cc"
    " amp ohm bit bar not the is are who one two six ten khz mhz ghz kpa mpa kwh"
)
"""Runs of two or three letters that are words, not products of variables."""
CARDINALS = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
)  # fmt: skip
TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
SCALES = {
    "dozen": 12, "hundred": 10**2, "thousand": 10**3, "lakh": 10**5, "million": 10**6, "crore": 10**7,
    "billion": 10**9, "trillion": 10**12, "quadrillion": 10**15, "quintillion": 10**18,
}  # fmt: skip
"""Words that multiply the number before them."""
_NUMBERS = word_set(
    " ".join((*CARDINALS, *TENS, *SCALES))
    + " googol myriad score gross couple pair half halve third quarter first fifth eighth ninth"
    " twelfth mil"
)
_ORDINALS = frozenset(
    ending
    for word in (*CARDINALS, *TENS, *SCALES)
    for ending in (f"{word}th", f"{word.removesuffix('y')}ieth", f"{word.removesuffix('e')}th")
)
NO_UNIT = (
    frozenset(form for word in _NUMBERS | _ORDINALS for form in (word, f"{word}s"))
    | {"halves"}
    | word_set(
        "not no nor neither never cannot is are was were be been being it its this that these those"
        " he she they we you i of or and but if unless because since so as than then else otherwise"
        " maybe perhaps possibly probably about around approximately approx roughly nearly almost"
        " exactly only just at by to from with without for on into out up down over under above"
        " below between among before after more less fewer greater larger smaller least most"
        " another other others extra additional false wrong incorrect right correct true guess sure"
        " unsure likely unlikely either both all none any some times fold double triple twice"
        " squared cubed factorial plus minus divided multiplied modulo base point positive negative"
        " choose remainder each every where when which who what how why can could may might must"
        " shall should will would do does did has have had instead rather alternatively also"
        " depending depends except excluding including the a an different too many few several"
        " print eval root roots reciprocal inverse opposite complement power hundredfold tenfold"
        " ish tens ones prime presumably hopefully rounded estimate estimated approximated"
        " supposedly apparently tentatively octal binary hexadecimal hex square squares cube cubes"
    )
)
"""Words that change, deny or explain a number: they are no units, even where the question has them.
"""
UNITS = {
    "meter": "metre", "inch": "in", "foot": "ft feet", "yard": "yd", "mile": "mi", "gram": "gr gramme gm",
    "kilogram": "kgs kilos kilogramme", "pound": "lb £ gbp", "ounce": "oz", "liter": "litre", "second": "sec",
    "minute": "min", "hour": "h hr", "day": "d", "week": "wk", "month": "mo", "year": "yr", "radian": "rad",
    "degree": "° deg", "dollar": "$ usd buck", "cent": "¢ \\cent", "euro": "€ eur", "yen": "¥", "rupee": "rs inr",
    "newton": "", "joule": "", "watt": "", "volt": "", "ampere": "amp", "kelvin": "", "hertz": "", "pascal": "",
    "mole": "", "calorie": "", "people": "person", "child": "children kid", "man": "men", "woman": "women",
    "unit": "", "percent": "% pct", "am": "a.m", "pm": "p.m", "acre": "", "hectare": "", "bit": "", "byte": "",
    "ton": "tonne", "celsius": "", "fahrenheit": "", "gallon": "gal", "quart": "qt", "pint": "pt", "cup": "",
    "ohm": "", "way": "",
}  # fmt: skip
"""Canonical unit -> its other names, in any case."""
SYMBOLS = {
    "m": "meter", "g": "gram", "s": "second", "L": "liter", "l": "liter", "N": "newton", "J": "joule", "W": "watt",
    "V": "volt", "A": "ampere", "K": "kelvin", "Hz": "hertz", "Pa": "pascal", "mol": "mole", "cal": "calorie",
    "Nm": "newton meter", "kWh": "kilowatt hour",
}  # fmt: skip
"""Symbols of SI units, which differ by case: Mg is not mg."""
PREFIXES = {
    "G": "giga", "M": "mega", "k": "kilo", "h": "hecto", "d": "deci", "c": "centi", "m": "milli", "n": "nano",
}  # fmt: skip
BARE_UNITS = word_set("m g s h d L l N J W V")
"""Single letters that are a unit after a number and a space, even outside of `\\text{}`."""
COUNTED = word_set(
    "apple animal arrangement bag ball balloon banana bead bean bird block board book bottle box"
    " boy bracelet brick bus button cake can candle candy car card case cat chair chicken chocolate"
    " choice circle class coin color combination cookie cow crayon cupcake customer dog doll donut"
    " duck egg employee envelope event fish flower friend frog fruit game gift girl goal grape"
    " guest hat horse house integer item jar key kitten lap leg lemon letter line loaf marble match"
    " meal member mouse movie muffin necklace night notebook object onion orange outcome page"
    " painting paper passenger path pen pencil penny permutation pet photo picture piece pig pill"
    " pizza plant plate player point possibility present pupil puppy puzzle question rabbit ribbon"
    " ring rock room rose route row sandwich seat seed sequence sheep sheet shell shirt shoe side"
    " slice snack sock song solution stamp star step sticker stone store strawberry student subset"
    " sweet table task teacher team thing ticket tile token tomato toy tree triangle trip truck"
    " turtle value vertex visitor vote wheel window word worker"
)
"""Things that may follow a number where the question is not known."""
GENERIC = word_set(
    "arrangement combination permutation possibility choice outcome solution item object thing"
    " piece"
)
"""Things that are counted in any question."""
KINDS = word_set(
    "different distinct possible such total ordered unordered positive whole unique valid"
)
"""Words before a noun that do not change the number."""
QUANTITIES = word_set(
    "area perimeter circumference volume length width height depth radius diameter probability"
    " distance speed cost price weight mass time age sum average mean median slope"
)
"""Quantities that a sentence may state where the question is not known."""
DERIVED = word_set(
    "square squared cube cubed root sum product difference quotient remainder ratio percentage"
    " fraction rate base double half twice triple third quarter number value reciprocal inverse"
)
"""What is computed of other numbers: a sentence about it tells no other quantity."""
NEUTRAL = word_set(
    "a an the his her hers its their our your my this that these those he she they it we you i him"
    " them us me there here so thus hence therefore then finally also now currently still only"
    " exactly just is are was were be been will would do does did has have had of in on at to for"
    " from with by and each every total altogether together all overall end"
)
"""Words of a sentence that do not change its number."""
CONTAINERS = word_set(
    "rectangle triangle circle polygon cube sphere train car cake pizza class room box bag group"
    " team school end week day month year line curve"
)
"""Things in which something is counted or measured, where the question is not known."""
DIMENSIONS = {
    "length": "nanometer millimeter centimeter decimeter meter kilometer inch foot yard mile unit",
    "length^2": "acre hectare", "length^3": "milliliter centiliter deciliter liter gallon quart pint cup",
    "time": "millisecond second minute hour day week month year", "mass": "milligram gram kilogram ton pound ounce",
    "money": "dollar cent euro pound yen rupee", "angle": "degree radian",
    "temperature": "degree celsius fahrenheit kelvin", "share": "percent",
}  # fmt: skip
"""The units of a dimension."""
_BASES = word_set(
    "newton joule watt volt ampere kelvin hertz pascal mole calorie ohm byte bit meter gram second"
    " liter celsius"
)
MEASURES = frozenset(
    f"{prefix}{base}" for prefix in ("", *PREFIXES.values()) for base in _BASES
) | {"kilowatt hour"}
"""Units of measurement of any dimension."""
QUANTITY_DIMENSIONS = {
    "area": ("length^2",), "volume capacity": ("length^3",),
    "perimeter circumference length width height radius diameter distance depth side diagonal altitude hypotenuse edge "
    "far tall wide deep farther": ("length",),
    "long longer": ("length", "time"), "time age old": ("time",), "speed velocity fast pace": ("length/time",),
    "cost price pay earn spend profit wage salary revenue money income worth": ("money",),
    "mass weight weigh heavy": ("mass",), "angle": ("angle",), "temperature": ("temperature",),
    "percent percentage probability chance ratio fraction": ("share",), "rate density": (),
}  # fmt: skip
"""The dimensions of a quantity that a question asks for."""
