//! The state of a rendering, and the evaluation of expressions.

use std::sync::Arc;

use crate::arguments::{CallArguments, global, unique};
use crate::ast::{Arguments, Expression, ExpressionKind, FilterCall, For, Macro, Statement};
use crate::clock::Clock;
use crate::error::{Failure, Result, fail};
use crate::limits::Limits;
use crate::value::{Value, ViewKind};
use crate::{compare, items, methods, ops, text};

/// The maximum nesting depth of expressions, blocks and macros that are being evaluated.
const MAX_DEPTH: usize = 400;

/// A template that is being rendered.
pub(crate) struct Rendering<'t> {
    pub(crate) limits: Limits,
    pub(crate) clock: Clock,
    /// The variables of blocks and macros. The first scope belongs to the caller, the second scope to the whole template.
    scopes: Vec<Scope>,
    /// The index of the innermost scope.
    scope: usize,
    pub(crate) objects: Vec<Object<'t>>,
    pub(crate) out: String,
    depth: usize,
}

/// The variables of a block, a macro or an iteration of a loop.
#[derive(Default)]
struct Scope {
    names: Vec<(Arc<str>, Value)>,
    /// The index of the enclosing scope.
    parent: Option<usize>,
    /// Whether a macro may read this scope later.
    captured: bool,
}

/// A value with an identity.
pub(crate) enum Object<'t> {
    /// A macro, and the scope of its definition.
    Macro(&'t Macro, usize),
    Namespace(Vec<(Arc<str>, Value)>),
    Loop(Loop<'t>),
    Cycler {
        items: Vec<Value>,
        at: usize,
    },
    Joiner {
        separator: Value,
        used: bool,
    },
}

/// The variable `loop`.
pub(crate) struct Loop<'t> {
    pub(crate) statement: &'t For,
    pub(crate) items: Arc<[Value]>,
    pub(crate) index: usize,
    /// The number of enclosing iterations, if the loop is recursive.
    pub(crate) depth: usize,
    /// The scope that encloses the loop.
    pub(crate) scope: usize,
    /// The arguments of the last call of `changed`.
    pub(crate) changed: Option<Value>,
}

impl<'t> Rendering<'t> {
    pub(crate) fn new(variables: Vec<(String, Value)>, clock: Clock, limits: Limits) -> Rendering<'t> {
        let names = variables.into_iter().map(|(name, value)| (name.into(), value)).collect();
        // Variables that the template sets are in a separate scope.
        let scopes = vec![Scope { names, ..Scope::default() }, Scope { parent: Some(0), ..Scope::default() }];
        let (objects, out) = (Vec::new(), String::new());
        Rendering { limits, clock, scopes, scope: 1, objects, out, depth: 0 }
    }

    /// Renders a whole template.
    pub(crate) fn run(mut self, body: &'t [Statement]) -> Result<String> {
        self.statements(body)?;
        Ok(self.out)
    }

    /// Runs `inner` one nesting level deeper.
    pub(crate) fn deeper<T>(&mut self, line: usize, inner: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        if self.depth == MAX_DEPTH {
            let reason = format!("more than {MAX_DEPTH} expressions, blocks and macros are within each other");
            return Err(Failure { reason, line });
        }
        self.depth += 1;
        let result = self.limits.steps(1).and_then(|()| inner(self));
        self.depth -= 1;
        result.map_err(|failure| failure.at(line))
    }

    /// Begins a scope within `parent`. Returns the previous scope.
    pub(crate) fn enter(&mut self, parent: usize) -> Result<usize> {
        self.limits.room_for_items(2)?;
        self.scopes.push(Scope { parent: Some(parent), ..Scope::default() });
        Ok(std::mem::replace(&mut self.scope, self.scopes.len() - 1))
    }

    /// Ends a scope, and returns to the scope `outside`.
    pub(crate) fn leave(&mut self, outside: usize) {
        if self.scope + 1 == self.scopes.len() && !self.scopes[self.scope].captured {
            self.scopes.pop();
        }
        self.scope = outside;
    }

    pub(crate) fn current_scope(&self) -> usize {
        self.scope
    }

    /// Keeps the enclosing scopes, because a macro may read them later.
    pub(crate) fn capture_scopes(&mut self) {
        let mut scope = Some(self.scope);
        while let Some(at) = scope.filter(|at| !self.scopes[*at].captured) {
            self.scopes[at].captured = true;
            scope = self.scopes[at].parent;
        }
    }

    pub(crate) fn assign(&mut self, name: &Arc<str>, value: Value) -> Result<()> {
        self.limits.room_for_items(2)?;
        let names = &mut self.scopes[self.scope].names;
        match names.iter_mut().find(|(known, _)| known == name) {
            Some((_, known)) => *known = value,
            None => names.push((name.clone(), value)),
        }
        Ok(())
    }

    pub(crate) fn object(&mut self, object: Object<'t>) -> Result<Value> {
        self.limits.room_for_items(4)?;
        self.objects.push(object);
        Ok(Value::Object(self.objects.len() - 1))
    }

    /// Returns the value of a variable.
    pub(crate) fn variable(&self, name: &str) -> Value {
        let mut scope = Some(self.scope);
        while let Some(at) = scope {
            let Scope { names, parent, .. } = &self.scopes[at];
            if let Some((_, value)) = names.iter().find(|(known, _)| **known == *name) {
                return value.clone();
            }
            scope = *parent;
        }
        global(name).unwrap_or_else(|| Value::Undefined(format!("'{name}' is undefined").into()))
    }

    /// Evaluates an expression.
    pub(crate) fn evaluate(&mut self, expression: &'t Expression) -> Result<Value> {
        match &expression.kind {
            ExpressionKind::Constant(value) => Ok(value.clone()),
            ExpressionKind::Name(name) => {
                self.limits.steps(1)?;
                Ok(self.variable(name))
            }
            kind => self.deeper(expression.line, |rendering| rendering.compound(kind)),
        }
    }

    /// Evaluates an expression whose value is used. Errors for an undefined value if the rendering is strict.
    pub(crate) fn evaluate_used(&mut self, expression: &'t Expression) -> Result<Value> {
        let value = self.evaluate(expression)?;
        self.limits.expect_defined(&value)?;
        Ok(value)
    }

    /// Dispatches to small functions, because the stack has the frames of all enclosing expressions.
    fn compound(&mut self, kind: &'t ExpressionKind) -> Result<Value> {
        match kind {
            ExpressionKind::Constant(_) | ExpressionKind::Name(_) => unreachable!("they have no parts"),
            ExpressionKind::List(items) => self.sequence(items, Limits::list),
            ExpressionKind::Tuple(items) => self.sequence(items, Limits::tuple),
            ExpressionKind::Dict(entries) => self.dict(entries),
            ExpressionKind::Condition(test, then, otherwise) => self.condition(test, then, otherwise.as_deref()),
            ExpressionKind::And(left, right) => self.either(left, right, false),
            ExpressionKind::Or(left, right) => self.either(left, right, true),
            ExpressionKind::Not(value) => self.evaluate_used(value).map(|value| Value::Bool(!value.is_true())),
            ExpressionKind::Compare(first, others) => self.compare(first, others),
            ExpressionKind::Binary(op, left, right) => self.binary(op, left, right),
            ExpressionKind::Concatenation(parts) => self.concatenation(parts),
            ExpressionKind::Negative(value) => self.signed("-", value),
            ExpressionKind::Positive(value) => self.signed("+", value),
            ExpressionKind::Attribute(value, name) => self.attribute_of(value, name),
            ExpressionKind::Item(value, index) => self.item_of(value, index),
            ExpressionKind::Slice(value, parts) => self.slice(value, parts),
            ExpressionKind::Call(callee, arguments) => self.call_of(callee, arguments),
            ExpressionKind::Filter(value, filter) => self.filtered(value, filter),
            ExpressionKind::Test(value, test) => self.tested(value, test),
        }
    }

    fn sequence(&mut self, items: &'t [Expression], made: fn(&Limits, Vec<Value>) -> Result<Value>) -> Result<Value> {
        let items = self.all(items)?;
        made(&self.limits, items)
    }

    fn condition(
        &mut self,
        test: &'t Expression,
        then: &'t Expression,
        otherwise: Option<&'t Expression>,
    ) -> Result<Value> {
        match (self.evaluate_used(test)?.is_true(), otherwise) {
            (true, _) => self.evaluate(then),
            (false, Some(otherwise)) => self.evaluate(otherwise),
            (false, None) => {
                Ok(Value::Undefined("an `if` without `else` was false, so the expression has no value".into()))
            }
        }
    }

    /// Evaluates `left and right` or `left or right`: returns `left` if its truth equals `decides`, else `right`.
    fn either(&mut self, left: &'t Expression, right: &'t Expression, decides: bool) -> Result<Value> {
        let left = self.evaluate_used(left)?;
        if left.is_true() == decides { Ok(left) } else { self.evaluate(right) }
    }

    fn binary(&mut self, op: &'static str, left: &'t Expression, right: &'t Expression) -> Result<Value> {
        let left = self.evaluate(left)?;
        let right = self.evaluate(right)?;
        ops::binary(op, &left, &right, &self.limits)
    }

    fn concatenation(&mut self, parts: &'t [Expression]) -> Result<Value> {
        let parts = self.all(parts)?;
        parts.iter().try_for_each(|part| self.limits.expect_defined(part))?;
        ops::concatenate(&parts, &self.limits)
    }

    fn signed(&mut self, sign: &'static str, value: &'t Expression) -> Result<Value> {
        let value = self.evaluate(value)?;
        match sign {
            "-" => ops::negative(&value, &self.limits),
            _ => ops::binary("+", &Value::Int(0), &value, &self.limits),
        }
    }

    fn attribute_of(&mut self, value: &'t Expression, name: &Arc<str>) -> Result<Value> {
        let value = self.evaluate(value)?;
        self.attribute(&value, name)
    }

    fn item_of(&mut self, value: &'t Expression, index: &'t Expression) -> Result<Value> {
        let value = self.evaluate(value)?;
        let index = self.evaluate(index)?;
        self.item(&value, &index)
    }

    fn call_of(&mut self, callee: &'t Expression, arguments: &'t Arguments) -> Result<Value> {
        let callee = self.evaluate(callee)?;
        let arguments = self.arguments(arguments)?;
        self.call(&callee, arguments)
    }

    fn filtered(&mut self, value: &'t Expression, filter: &'t FilterCall) -> Result<Value> {
        let takes_undefined = matches!(&*filter.name, "default" | "d");
        let value = if takes_undefined { self.evaluate(value)? } else { self.evaluate_used(value)? };
        let arguments = self.arguments(&filter.arguments)?;
        self.filter(&filter.name, &value, &arguments).map_err(|failure| failure.at(filter.line))
    }

    fn tested(&mut self, value: &'t Expression, test: &'t FilterCall) -> Result<Value> {
        let value = self.evaluate(value)?;
        let arguments = self.arguments(&test.arguments)?;
        self.test(&test.name, &value, &arguments).map(Value::Bool)
    }

    fn all(&mut self, items: &'t [Expression]) -> Result<Vec<Value>> {
        items.iter().map(|item| self.evaluate(item)).collect()
    }

    fn dict(&mut self, entries: &'t [(Expression, Expression)]) -> Result<Value> {
        let mut values = Vec::with_capacity(entries.len());
        for (key, value) in entries {
            values.push((self.evaluate(key)?, self.evaluate(value)?));
        }
        unique(values, &self.limits)
    }

    fn slice(&mut self, value: &'t Expression, parts: &'t [Option<Expression>; 3]) -> Result<Value> {
        let value = self.evaluate(value)?;
        let mut values = [None, None, None];
        for (value, part) in values.iter_mut().zip(parts) {
            *value = part.as_ref().map(|part| self.evaluate(part)).transpose()?;
        }
        items::slice(&value, values, &self.limits)
    }

    fn compare(&mut self, first: &'t Expression, others: &'t [(&'static str, Expression)]) -> Result<Value> {
        let mut left = self.evaluate(first)?;
        for (op, right) in others {
            let right = self.evaluate(right)?;
            if !self.holds(op, &left, &right)? {
                return Ok(Value::Bool(false));
            }
            left = right;
        }
        Ok(Value::Bool(true))
    }

    /// Whether `left op right` holds.
    pub(crate) fn holds(&self, op: &str, left: &Value, right: &Value) -> Result<bool> {
        let order = || compare::order(op, left, right, &self.limits);
        Ok(match op {
            "==" => compare::equal(left, right, &self.limits)?,
            "!=" => !compare::equal(left, right, &self.limits)?,
            "in" => compare::contains(right, left, &self.limits)?,
            "not in" => !compare::contains(right, left, &self.limits)?,
            "<" => order()?.is_some_and(std::cmp::Ordering::is_lt),
            "<=" => order()?.is_some_and(std::cmp::Ordering::is_le),
            ">" => order()?.is_some_and(std::cmp::Ordering::is_gt),
            _ => order()?.is_some_and(std::cmp::Ordering::is_ge),
        })
    }

    /// Evaluates the arguments of a call.
    pub(crate) fn arguments(&mut self, arguments: &'t Arguments) -> Result<CallArguments> {
        let mut positional = self.all(&arguments.positional)?;
        let mut named = Vec::new();
        for (name, value) in &arguments.named {
            named.push((name.clone(), self.evaluate(value)?));
        }
        if let Some(more) = &arguments.more {
            let more = self.evaluate(more)?;
            positional.extend(items::iterate(&more, &self.limits)?);
        }
        if let Some(more) = &arguments.more_named {
            let Value::Dict(dict) = self.evaluate(more)? else { return fail("`**` needs a dict") };
            self.limits.room_for_items(2 * dict.entries.len())?;
            for (key, value) in &dict.entries {
                let Value::Str(name) = key else { return fail("`**` needs a dict whose keys are texts") };
                named.push((name.clone(), value.clone()));
            }
        }
        Ok(CallArguments { positional, named })
    }

    /// Returns `value.name`: an attribute or method of Python, else an item.
    pub(crate) fn attribute(&self, value: &Value, name: &Arc<str>) -> Result<Value> {
        if let Value::Undefined(why) = value {
            return fail(why.to_string());
        }
        if name.starts_with("__") {
            return Ok(Value::Undefined(
                format!("access to attribute '{name}' of '{}' object is unsafe.", value.class()).into(),
            ));
        }
        if let Value::Object(object) = value {
            return self.object_attribute(*object, name);
        }
        if methods::exists(value, name) {
            return self.limits.method(value.clone(), name);
        }
        let item = if let Value::Dict(dict) = value { dict.get(name).cloned() } else { None };
        let missing = || Value::Undefined(format!("'{} object' has no attribute '{name}'", value.class()).into());
        Ok(item.unwrap_or_else(missing))
    }

    /// Returns `value[key]`: an item, else an attribute.
    pub(crate) fn item(&self, value: &Value, key: &Value) -> Result<Value> {
        let found = match value {
            Value::Undefined(why) => return fail(why.to_string()),
            Value::Dict(dict) => compare::get(&dict.entries, key, &self.limits)?.cloned(),
            _ => items::at(value, key, &self.limits)?,
        };
        match (found, key) {
            (Some(found), _) => Ok(found),
            (None, Value::Str(name)) => self.attribute(value, name),
            (None, Value::Undefined(why)) => Ok(Value::Undefined(why.clone())),
            (None, _) => {
                let shown = text::string(key, &self.limits)?;
                Ok(Value::Undefined(format!("{} object has no element {shown}", value.class()).into()))
            }
        }
    }

    fn object_attribute(&self, object: usize, name: &Arc<str>) -> Result<Value> {
        let missing = |class: &str| Ok(Value::Undefined(format!("'{class} object' has no attribute '{name}'").into()));
        let found = match &self.objects[object] {
            Object::Namespace(attributes) => {
                attributes.iter().find(|(known, _)| known == name).map(|(_, value)| value.clone())
            }
            Object::Loop(state) => return self.loop_attribute(object, state, name),
            Object::Macro(called, _) if **name == *"name" => Some(Value::Str(called.name.clone())),
            Object::Cycler { items, at } if **name == *"current" => items.get(*at).cloned(),
            Object::Cycler { .. } if matches!(&**name, "next" | "reset") => {
                Some(self.limits.method(Value::Object(object), name)?)
            }
            Object::Macro(..) | Object::Cycler { .. } | Object::Joiner { .. } => None,
        };
        found.map_or_else(|| missing("Namespace"), Ok)
    }

    fn loop_attribute(&self, object: usize, state: &Loop, name: &Arc<str>) -> Result<Value> {
        let (index, length) = (state.index, state.items.len());
        let number = |number: usize| Ok(Value::Int(number as i64));
        let neighbour = |at: Option<usize>, what: &str| {
            let item = at.and_then(|at| state.items.get(at)).cloned();
            Ok(item.unwrap_or_else(|| Value::Undefined(format!("there is no {what} item").into())))
        };
        match &**name {
            "index" => number(index + 1),
            "index0" => number(index),
            "revindex" => number(length - index),
            "revindex0" => number(length - index - 1),
            "first" => Ok(Value::Bool(index == 0)),
            "last" => Ok(Value::Bool(index + 1 == length)),
            "length" => number(length),
            "depth" => number(state.depth + 1),
            "depth0" => number(state.depth),
            "previtem" => neighbour(index.checked_sub(1), "previous"),
            "nextitem" => neighbour(Some(index + 1), "next"),
            "cycle" | "changed" => self.limits.method(Value::Object(object), name),
            _ => Ok(Value::Undefined(format!("'LoopContext object' has no attribute '{name}'").into())),
        }
    }

    /// Returns `items` as a Python generator.
    pub(crate) fn generator(&self, items: Vec<Value>) -> Result<Value> {
        self.limits.view(ViewKind::Generator, items)
    }
}
