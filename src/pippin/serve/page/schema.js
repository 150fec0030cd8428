// JSON Schema in the page: following references, building one from a list of fields, checking a value.

/** The schema that a local reference points to; other keywords beside the reference are kept. */
export function resolve(schema, root, steps = 0) {
  if (!schema || typeof schema !== "object" || typeof schema.$ref !== "string" || steps > 20) return schema ?? {};
  let target = root;
  if (schema.$ref !== "#") {
    for (const part of schema.$ref.replace(/^#\//, "").split("/")) {
      target = target?.[decodeURIComponent(part).replaceAll("~1", "/").replaceAll("~0", "~")];
    }
  }
  const { $ref, ...rest } = schema;
  return resolve({ ...target, ...rest }, root, steps + 1);
}

/** The one type of a schema, as a name of JSON Schema; "enum" where values are listed, "any" where it is not clear. */
export function kindOf(schema) {
  if (!schema || typeof schema !== "object") return "any";
  if (Array.isArray(schema.enum)) return "enum";
  const types = (Array.isArray(schema.type) ? schema.type : [schema.type]).filter((type) => type !== "null");
  if (types.length === 1 && types[0]) return types[0];
  if (schema.properties) return "object";
  return "any";
}

/** The name JSON has for the type of a value. */
export function typeOf(value) {
  if (value === null) return "null";
  if (Array.isArray(value)) return "array";
  if (typeof value === "number") return Number.isInteger(value) ? "integer" : "number";
  return typeof value;
}

const same = (a, b) => JSON.stringify(a) === JSON.stringify(b);
const count = (text) => [...text].length;
const LIMITS = [
  ["minLength", "string", (v, n) => count(v) >= n, (n) => `is shorter than ${n} characters`],
  ["maxLength", "string", (v, n) => count(v) <= n, (n) => `is longer than ${n} characters`],
  ["minimum", "number", (v, n) => v >= n, (n) => `is less than ${n}`],
  ["maximum", "number", (v, n) => v <= n, (n) => `is more than ${n}`],
  ["exclusiveMinimum", "number", (v, n) => v > n, (n) => `is not more than ${n}`],
  ["exclusiveMaximum", "number", (v, n) => v < n, (n) => `is not less than ${n}`],
  ["minItems", "array", (v, n) => v.length >= n, (n) => `has fewer than ${n} items`],
  ["maxItems", "array", (v, n) => v.length <= n, (n) => `has more than ${n} items`],
];

/**
 * What is wrong with a value, as a list of {path, message}; empty where nothing is. Knows the keywords that the builder
 * writes and the common ones beside them; the server's own check is the complete one.
 */
export function check(value, schema, root = schema, path = "") {
  const rule = resolve(schema, root);
  if (rule === true || !rule || typeof rule !== "object") return [];
  const type = typeOf(value);
  const wrong = (message) => [{ path: path || "the value", message }];
  const types = rule.type === undefined ? null : [rule.type].flat();
  if (types && !types.includes(type) && !(type === "integer" && types.includes("number")))
    return wrong(`is ${type}, expected ${types.join(" or ")}`);
  if (Array.isArray(rule.enum) && !rule.enum.some((option) => same(option, value)))
    return wrong(`is not one of ${rule.enum.map((option) => JSON.stringify(option)).join(", ")}`);
  if ("const" in rule && !same(rule.const, value)) return wrong(`is not ${JSON.stringify(rule.const)}`);
  const plain = type === "integer" ? "number" : type;
  const found = LIMITS.flatMap(([word, kind, holds, text]) =>
    kind === plain && typeof rule[word] === "number" && !holds(value, rule[word]) ? wrong(text(rule[word])) : [],
  );
  if (Array.isArray(rule.anyOf) && rule.anyOf.every((option) => check(value, option, root, path).length))
    found.push(...wrong("fits none of the alternatives"));
  if (type === "array") found.push(...checkItems(value, rule, root, path));
  if (type === "object") found.push(...checkProperties(value, rule, root, path));
  return found;
}

function checkItems(value, rule, root, path) {
  const first = rule.prefixItems ?? [];
  return value.flatMap((item, index) => {
    const each = first[index] ?? rule.items;
    return each === undefined ? [] : check(item, each, root, `${path}[${index}]`);
  });
}

function checkProperties(value, rule, root, path) {
  const known = rule.properties ?? {};
  const at = (name) => (path ? `${path}.${name}` : name);
  const missing = (rule.required ?? []).filter((name) => !Object.hasOwn(value, name));
  const found = missing.map((name) => ({ path: at(name), message: "is missing" }));
  for (const [name, item] of Object.entries(value)) {
    if (Object.hasOwn(known, name)) found.push(...check(item, known[name], root, at(name)));
    else if (rule.additionalProperties === false) found.push({ path: at(name), message: "is not part of the schema" });
    else if (typeof rule.additionalProperties === "object") found.push(...check(item, rule.additionalProperties, root, at(name)));
  }
  return found;
}

/** A schema from the builder's fields: a list of {name, type, required, description, options, item, fields}. */
export function fromFields(fields) {
  const properties = {};
  for (const each of fields) {
    if (each.name) Object.defineProperty(properties, each.name, { value: fromField(each), enumerable: true, configurable: true });
  }
  const required = fields.filter((each) => each.name && each.required).map((each) => each.name);
  return { type: "object", properties, required, additionalProperties: false };
}

function fromField({ type, description, options, item, fields }) {
  const note = description ? { description } : {};
  if (type === "enum") return { type: "string", enum: options, ...note };
  if (type === "object") return { ...fromFields(fields ?? []), ...note };
  if (type === "array") return { type: "array", items: fromField({ type: item ?? "string", fields, options }), ...note };
  return { type, ...note };
}

const SIMPLE = ["string", "integer", "number", "boolean"];

/** The builder's fields of a schema, or null where the builder cannot show all of it. */
export function toFields(schema) {
  const known = ["type", "properties", "required", "additionalProperties", "title", "description", "$schema"];
  if (schema?.type !== "object" || Object.keys(schema).some((word) => !known.includes(word))) return null;
  if (schema.additionalProperties !== undefined && schema.additionalProperties !== false) return null;
  const fields = Object.entries(schema.properties ?? {}).map(([name, each]) => {
    const shape = toField(each);
    return shape && { name, required: (schema.required ?? []).includes(name), description: each.description ?? "", ...shape };
  });
  return fields.every(Boolean) ? fields : null;
}

function toField(schema) {
  const words = Object.keys(schema ?? {}).filter((word) => word !== "description" && word !== "type");
  const only = (...allowed) => words.every((word) => allowed.includes(word));
  if (Array.isArray(schema?.enum))
    return only("enum") && schema.enum.every((option) => typeof option === "string") ? { type: "enum", options: schema.enum } : null;
  if (SIMPLE.includes(schema?.type)) return only() ? { type: schema.type } : null;
  if (schema?.type === "object") {
    const fields = toFields(schema);
    return fields && { type: "object", fields };
  }
  if (schema?.type === "array" && only("items") && schema.items) {
    const item = toField(schema.items);
    if (!item || item.type === "array" || schema.items.description) return null;
    return { type: "array", item: item.type, fields: item.fields, options: item.options };
  }
  return null;
}
