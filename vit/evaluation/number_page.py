def write_number_report(facts, answers, values, found):
    (facts.folder / "report.html").write_text("x")
