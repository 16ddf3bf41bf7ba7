use super::*;
use std::collections::BTreeMap;

fn linears() -> Vec<String> {
    let modules = ["self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj"];
    (0..12).flat_map(|layer| modules.map(|module| format!("model.layers.{layer}.{module}"))).collect()
}

/// Returns the linears with adapters, without the prefix `model.layers.`.
fn of(lora: &Lora) -> Vec<String> {
    let linears = linears();
    lora.check(linears.iter(), &Modules::default()).unwrap();
    linears
        .iter()
        .filter(|linear| lora.has(linear))
        .map(|name| name.trim_start_matches("model.layers.").into())
        .collect()
}

fn pattern(text: &str) -> Targets {
    Targets::Pattern(Pattern::new(text).unwrap())
}

fn names(names: &[&str]) -> Targets {
    Targets::Names(names.iter().map(|name| name.to_string()).collect())
}

#[test]
fn a_regular_expression_matches_whole_names() {
    let with = |targets: Targets| Lora { targets, ..Lora::default() };
    assert_eq!(of(&with(pattern(r".*\.(1|11)\..*(q|v)_proj"))).len(), 4);
    assert_eq!(of(&with(pattern(r"model\.layers\.0\..*(?<!q)_proj"))), ["0.self_attn.v_proj", "0.mlp.down_proj"]);
    assert_eq!(
        of(&with(pattern(r"model\.layers\.3\.mlp\.down_proj|.*\.4\.mlp\.down_proj"))).len(),
        2,
        "each branch is whole"
    );
    let error = with(pattern("q_proj")).check(linears().iter(), &Modules::default()).unwrap_err().to_string();
    assert!(error.contains("\"q_proj\" matches the whole name of no linear") && error.contains("`q_proj`"), "{error}");
    assert!(Pattern::new("(q_proj").unwrap_err().contains("is no regular expression"));
    let slow = with(pattern(r"((?:.+)+)+(?=x)\1?#")).check(linears().iter(), &Modules::default());
    assert!(slow.is_err(), "no hang, and no silent mismatch");
}

#[test]
fn excluded_linears_and_layers_have_no_adapters() {
    let with = |targets: Targets, exceptions: Exceptions| Lora { targets, exceptions, ..Lora::default() };
    let exclude = |exclude: Targets| Exceptions { exclude, ..Exceptions::default() };
    assert_eq!(of(&with(Targets::AllLinear, exclude(names(&["q_proj", "down_proj"])))).len(), 12);
    assert_eq!(of(&with(names(&["q_proj"]), exclude(pattern(r".*\.1\d?\..*")))).len(), 9);
    let layers = |layers: &[usize], patterns: &[&str]| Exceptions {
        layers: layers.to_vec(),
        layers_pattern: patterns.iter().map(|text| text.to_string()).collect(),
        ..Exceptions::default()
    };
    assert_eq!(of(&with(names(&["v_proj"]), layers(&[1, 10], &[]))), ["1.self_attn.v_proj", "10.self_attn.v_proj"]);
    assert_eq!(of(&with(names(&["v_proj"]), layers(&[1], &["blocks", "layers"]))), ["1.self_attn.v_proj"]);
    // A whole name identifies one layer, so the list of layers does not apply.
    let whole = names(&["v_proj", "model.layers.7.self_attn.q_proj"]);
    assert_eq!(of(&with(whole, layers(&[1], &[]))), ["1.self_attn.v_proj", "7.self_attn.q_proj"]);
    for exceptions in [layers(&[1], &["blocks"]), layers(&[99], &[]), exclude(names(&["v_proj"]))] {
        let error =
            with(names(&["v_proj"]), exceptions).check(linears().iter(), &Modules::default()).unwrap_err().to_string();
        assert!(error.contains("no linear of this model's blocks is left"), "{error}");
    }
}

#[test]
fn ranks_and_factors_may_depend_on_names() {
    let patterns =
        |of: &[(&str, usize)]| of.iter().map(|(text, value)| (text.to_string(), *value)).collect::<BTreeMap<_, _>>();
    let ranks = patterns(&[("q_proj", 4), (r"layers\.[01]\.mlp\.down_proj", 16)]);
    let alphas = BTreeMap::from([("model.layers.0.self_attn.q_proj".to_string(), 2.0)]);
    let lora = Lora {
        r: 8,
        alpha: 16.0,
        exceptions: Exceptions { ranks, alphas, ..Exceptions::default() },
        ..Lora::default()
    };
    let of = |name: &str| (lora.rank(name), lora.scale(name));
    assert_eq!(of("model.layers.0.self_attn.q_proj"), (4, 0.5));
    assert_eq!(of("model.layers.1.self_attn.q_proj"), (4, 4.0));
    assert_eq!(of("model.layers.1.mlp.down_proj"), (16, 1.0));
    assert_eq!(of("model.layers.2.mlp.down_proj"), (8, 2.0));
    assert_eq!(of("model.layers.2.mlp.xq_proj"), (8, 2.0), "patterns begin after a dot");
    lora.check(linears().iter(), &Modules::default()).unwrap();
    let error = |of: &[(&str, usize)]| {
        let exceptions = Exceptions { ranks: patterns(of), ..Exceptions::default() };
        Lora { exceptions, ..Lora::default() }.check(linears().iter(), &Modules::default()).unwrap_err().to_string()
    };
    assert!(error(&[("q_proj", 4), (".*_proj", 8)]).contains("`.*_proj` and `q_proj` both match"));
    assert!(error(&[("(q_proj", 4)]).contains("is no regular expression"));
    assert!(error(&[("q_proj", 0)]).contains("the rank of `q_proj` is 0"));
}

/// Entries match the ends of names, as in PEFT, and never a linear of a block or a module that contains one.
#[test]
fn modules_to_save_are_modules_without_linears() {
    let mut modules = Modules::default();
    for tensor in
        ["model.embed_tokens.weight", "model.layers.0.input_layernorm.weight", "model.norm.weight", "lm_head.weight"]
    {
        modules.add(tensor, 0);
    }
    modules.add("model.layers.0.self_attn.q_proj.bias", 0);
    modules.add("model.layers.0.self_attn.sinks", 0);
    linears().iter().for_each(|linear| modules.add_frozen(&format!("{linear}.weight")));
    let check = |saved: &[&str]| {
        let lora = Lora { modules_to_save: saved.iter().map(|name| name.to_string()).collect(), ..Lora::default() };
        lora.check(linears().iter(), &modules).map(|()| lora).map_err(|error| error.to_string())
    };
    let lora = check(&["embed_tokens", "norm", "lm_head"]).unwrap();
    assert!(
        lora.saves("model.layers.0.input_layernorm") && lora.saves("model.norm") && !lora.saves("model.layers.0.mlp")
    );
    for (saved, words) in [
        ("q_proj", "`q_proj` matches `model.layers.0.self_attn.q_proj`, which has weights that stay frozen"),
        ("self_attn", "`self_attn` matches `model.layers.0.self_attn`, which has weights"),
        ("layers.3", "`layers.3` matches `model.layers.3`"),
        (
            "wte",
            "`wte` is no module of this model; modules that can be trained whole are `embed_tokens`, `input_layernorm`, `lm_head`, `norm`",
        ),
        ("", "an empty name matches every module"),
    ] {
        let error = check(&["lm_head", saved]).unwrap_err();
        assert!(error.contains("`modules_to_save`: ") && error.contains(words), "{saved}: {error}");
    }
}
