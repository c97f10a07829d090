"""Finds the value in a sentence of another language that only states it: `答案是 13。`, `Die Antwort
ist 13.`

A sentence is read by the words that it may hold besides the value, one list for each language. Any
other word, a denial (`不是`, `nicht`, `no es`), a hedge (`约`, `vielleicht`) or a half among them,
leaves a text that states no value.
"""

import re
from functools import cache

_SPACED = {
    "German": (
        "die der das dies dieser ein eine es endgültige endgültiges richtige richtiges korrekte"
        " korrektes finale gesuchte gesuchter unsere antwort lösung ergebnis endergebnis wert zahl"
        " anzahl lautet ist sind beträgt also somit daher damit folglich deshalb demnach"
        " schließlich insgesamt erhalten erhält wir man ergibt sich gleich und so zu für aufgabe"
        " hat haben gibt genau"
    ),
    "Spanish": (
        "la el lo los las respuesta resultado solución solucion valor número numero final correcta"
        " correcto es son da por tanto así asi que entonces luego obtenemos obtiene se tenemos nos"
        " queda hay de del problema a igual total en consiguiente finalmente será y concluimos"
        " nuestra buscado"
    ),
    "French": (
        "la le les l' réponse reponse résultat resultat solution valeur nombre finale final"
        " correcte correct bonne est sont donc ainsi alors par conséquent d'où on obtient obtenons"
        " nous avons trouve trouvons vaut égale égal à au problème cherchée cherché c'est soit il y"
        " a total en tout de du et enfin finalement notre"
    ),
    "Portuguese": (
        "a o as os resposta resultado solução valor número numero final correta correto é são dá"
        " portanto assim logo então por isso obtemos temos igual total de do da problema ao que e"
        " finalmente nossa há"
    ),
    "Italian": (
        "la il lo le l' risposta risultato soluzione valore numero finale corretta corretto giusta"
        " è e' sono dà quindi dunque perciò pertanto allora si ottiene otteniamo abbiamo uguale"
        " totale del della di problema a in così e cioè vale infine nostra ci"
    ),
    "Dutch": (
        "het de een antwoord eindantwoord resultaat oplossing waarde getal uiteindelijke juiste is"
        " zijn dus daarom bijgevolg we wij krijgen vinden hebben gelijk aan totaal uitkomst en zo"
        " dat er"
    ),
    "Swedish": (
        "svaret svar slutsvaret är blir alltså därför slutliga rätt rätta korrekta resultatet"
        " lösningen värdet vi får och det lika med totalt så"
    ),
    "Norwegian and Danish": (
        "svaret svar er blir bliver derfor altså altså endelige riktige rigtige resultatet "
        "løsningen "
        "verdien værdien vi får det og så lik med"
    ),
    "Polish": (
        "odpowiedź odpowiedzią wynik wynikiem rozwiązanie rozwiązaniem to jest wynosi zatem więc"
        " stąd dlatego ostateczna ostateczny końcowa końcowy prawidłowa poprawna otrzymujemy mamy"
        " równa równe równy się wartość suma razem"
    ),
    "Czech": (
        "odpověď výsledek řešení je tedy proto správná konečná hodnota rovná rovno se dostáváme"
    ),
    "Romanian": (
        "răspunsul răspuns este rezultatul soluția valoarea final corect deci prin urmare așadar"
        " obținem avem"
    ),
    "Hungarian": (
        "a az válasz végső helyes eredmény megoldás tehát ezért így érték értéke egyenlő kapjuk"
    ),
    "Turkish": (
        "cevap cevabı cevabımız yanıt sonuç sonucu doğru nihai böylece dolayısıyla bu nedenle halde"
        " o yani olur olarak eşittir değeri buluruz bulunur elde ederiz edilir toplam dir dır"
    ),
    "Vietnamese": (
        "vậy do đó vì nên suy ra đáp án số câu trả lời kết quả cuối cùng đúng giá trị cần tìm là"
        " bằng ta có được chúng tổng của bài toán"
    ),
    "Indonesian": (
        "jawabannya jawaban adalah hasilnya hasil jadi maka akhir akhirnya benar yang ialah sama"
        " dengan nilai nilainya oleh karena itu kita peroleh diperoleh total"
    ),
    "Russian": (
        "ответ ответом окончательный правильный итоговый результат решение значение число"
        " количество равен равна равно равняется составляет является это есть итак таким образом"
        " следовательно поэтому тогда значит получаем получим получается имеем мы задачи искомое"
        " всего в итоге и окончательно"
    ),
    "Ukrainian": (
        "відповідь правильна остаточна результат розв'язок значення число дорівнює отже тому таким"
        " чином маємо отримуємо це є"
    ),
    "Greek": (
        "η το απάντηση αποτέλεσμα λύση τελική σωστή είναι άρα επομένως συνεπώς ισούται με τιμή"
        " έχουμε παίρνουμε"
    ),
    "Arabic": (
        "الجواب الإجابة الاجابة النتيجة الناتج الحل القيمة النهائي النهائية الصحيح الصحيحة هو هي"
        " يساوي تساوي إذن إذا لذلك لذا وبالتالي بالتالي ومنه فإن نحصل على لدينا"
    ),
    "Hebrew": "התשובה הסופית הנכונה היא הוא לכן התוצאה הפתרון שווה אז",
    "Hindi": (
        "उत्तर जवाब हल परिणाम मान अंतिम सही का है हैं होगा इसलिए अतः अत तो हमें मिलता प्राप्त होता यह"
    ),
    "Korean": (
        "따라서 그러므로 그래서 즉 결국 최종 최종적인 정답 정답은 답 답은 답이 결과 결과는 결과값은"
        " 값 값은 "
        "해는 해 구하는 "
        "우리는 얻는다 얻습니다 는 은 이 가 이다 입니다 이에요 예요 됩니다 된다 총 모두 개 개입니다"
        " 개이다 가지 "
        "가지입니다"
    ),
}
_UNSPACED = {
    "Chinese": "所以 因此 因而 故 从而 於是 于是 那么 综上所述 综上 綜上所述 綜上 最终 最終 最后 最後 的 正确 "
    "正確 答案 应为 應為 "
    "结果 結果 值 解 总数 總數 总和 为 為 是 等于 等於 得到 得出 可得 可知 得 我们 我們 我 即 有 共有 一共 总共 "
    "總共 共 就是 "
    "则 則 本题 本題 该题 此题 这道题 這道題 题目 问题 所求 填 故选 选 答 求得 解得 原式 个 個 种 種 这 這 计算 計算",
    "Japanese": "したがって 従って よって ゆえに だから 故に 以上より 以上から すなわち つまり 最終的な 最終 "
    "正しい 正解 解答 "
    "答え 答 解 値 結果 は が の を となります となる になります になる となり である です だ 求める 得られる "
    "得る これ 合計 "
    "全部で 個 通り",
    "Thai": "ดังนั้น คำตอบ คือ เท่ากับ จะได้ ได้ ผลลัพธ์ เป็น จึง ที่ถูกต้อง สุดท้าย ค่า ของ",
}  # fmt: skip
LANGUAGES = (*_SPACED, *_UNSPACED)
"""The languages besides English that are read."""
# Words that an English text may have: they alone make no sentence of another language
_NO_MARK = frozenset(
    [
        "also",
        "final",
        "total",
        "man",
        "place",
        "haben",
        "sind",
        "number",
        "problema",
        "problem",
        "solution",
        "correct",
        "numero",
        "valor",
        "suma",
        "real",
        "base",
        "form",
        "hasil",
        "akhir",
        "mean",
        "more",
        "dies",
        "zahl",
        "then",
    ]
)
PROSE = (
    "\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u024f\u0300-\u036f\u0400-\u052f\u0590-\u0fff\u1000-\u1cff\u1e00-\u1fff"
    "\u3005-\u3007\u3021-\u9fff\uac00-\ud7af"
)
"""Characters of words, for a class of a pattern: letters with marks, and scripts that name no
variable.
"""
_PROSE_CHARACTER = re.compile(f"[{PROSE}]|[\u0370-\u03ff]{{3}}")
_MAX_CHARS = 300
_WORDS = re.compile(r"[A-Za-z]{2}|[^\x00-\x7f]")
_BETWEEN = r"[\s,，、:：*_~\"“”]*"
_ENDING = re.compile(r"[\s.。।!！*_\"“”]+$")
_SUBJECT = re.compile(
    r"(?P<subject>[^\d$\\=<>]{2,60}?)[ ]?(?P<verb>是|为|為|等于|等於|は|=|:|：|"
    r" (?:ist|sind|beträgt|es|est|vaut|é"
    r"|è|is|"
    r"jest|wynosi|равен|равна|равно|—|–|är|er|adalah|là)) ?(?P<value>[\d$\\({\[+−-].*)"
)
_FALSE_LATER = re.compile(
    r"错|錯|不对|不對|不是|不正确|间违|間違|誤り|違う|틀렸|틀린|아니|\bfalsch\b|\bincorrect[ao]?\b|\bfaux\b"
    r"|\bfalso\b|\berrad[ao]\b"
    r"|\bsbagliat[ao]\b|\bневерн|\bнеправильн|\bошибк|خطأ|ليس|गलत|नहीं|\bsai\b|\byanlış\b|\bdeğil\b|\bfout\b"
    r"|\bonjuist\b"
    r"|\bfel\b|\bbłędn|\bnicht\b|\bno es\b|\bn['’]est pas\b|\bnão é\b|\bnon"
    r" è\b|\bне\b|ではない|ではあり",
    re.IGNORECASE,
)
FOLLOWING = frozenset(
    [
        "ist",
        "sind",
        "wäre",
        "oder",
        "nicht",
        "falsch",
        "es",
        "son",
        "o",
        "u",
        "no",
        "est",
        "sont",
        "ou",
        "serait",
        "pas",
        "è",
        "sono",
        "sarebbe",
        "é",
        "são",
        "não",
        "jest",
        "nie",
        "albo",
        "eller",
        "och",
        "är",
        "er",
        "ikke",
        "niet",
        "fout",
        "of",
        "pas",
        "falso",
        "incorrecto",
        "errado",
        "sbagliato",
        "adalah",
        "bukan",
        "salah",
    ]
)
"""Words of other languages that begin a clause behind a value."""


def is_prose(text: str) -> bool:
    """Return True if a text has words in another script than plain Latin, or Latin letters with
    marks.
    """
    return not text.isascii() and _PROSE_CHARACTER.search(text) is not None


def denies(text: str) -> bool:
    """Return True if a text has a denial of another language."""
    return _FALSE_LATER.search(text) is not None


def value_in_language(line: str, question: str = "") -> str | None:
    """Return the value of a sentence of another language that only states it; None for any other
    text.

    Args:
        line: one line without repeated white space.
        question: the question, in whose language the subject may be a phrase of it.
    """
    if len(line) > _MAX_CHARS or not _WORDS.search(line):
        return None
    line = _ENDING.sub("", line.lstrip(' *_"“'))
    for language in LANGUAGES:
        opening_pattern, closing_pattern, marks = _patterns(language)
        opening = opening_pattern.match(line)
        start = opening.end() if opening else 0
        closing = closing_pattern.search(line, start)
        end = closing.start() if closing else len(line)
        value = line[start:end].strip(" ,:：，")
        if value and marks.search(f"{line[:start]} {line[end:]}") and not is_prose(value):
            return value
    if not is_prose(question) or not is_prose(line):
        return None
    statement = _SUBJECT.fullmatch(line)
    if statement is None:
        return None
    subject = statement["subject"].strip(" ,，").casefold()
    if len(subject) > 1 and _in_question(subject, question.casefold()):
        return statement["value"]
    return None


def _in_question(subject: str, question: str) -> bool:
    """Return True if the subject of a sentence, without a word such as `so` before it, is a phrase
    of the question.
    """
    if len(subject) > 1 and subject in question:
        return True
    for language in LANGUAGES:
        opening = _patterns(language)[0].match(subject)
        phrase = subject[opening.end() :] if opening else ""
        if len(phrase) > 1 and phrase in question:
            return True
    return False


@cache
def _patterns(language: str) -> tuple[re.Pattern[str], re.Pattern[str], re.Pattern[str]]:
    """Return the words of a language at the start of a text, at its end, and those that show the
    language.
    """
    spaced = language in _SPACED
    words = sorted((_SPACED.get(language) or _UNSPACED[language]).split(), key=len, reverse=True)
    marks = list(words)
    if spaced:
        # short words of plain letters stand in other languages as well
        long_words = [word for word in words if len(word) > 3 or not word.isascii()]
        marks = [word for word in long_words if word not in _NO_MARK]
    any_word = "|".join(map(re.escape, words))
    any_mark = "|".join(map(re.escape, marks))
    if spaced:
        any_word = rf"(?:{any_word})(?<!')(?![\w'])|(?:l|d|c)'(?=\w)"
        any_mark = rf"(?<!\w)(?:{any_mark})(?!\w)"
        ending_pattern = rf"(?:(?<=[\s\d}}$)\]])(?:{any_word}){_BETWEEN}){{1,12}}$"
    else:
        ending_pattern = rf"(?:(?:{any_word}){_BETWEEN}){{1,12}}$"
    return (
        re.compile(rf"{_BETWEEN}(?:(?:{any_word}){_BETWEEN}){{1,24}}", re.IGNORECASE),
        re.compile(rf"{_BETWEEN}{ending_pattern}", re.IGNORECASE),
        re.compile(any_mark, re.IGNORECASE),
    )
